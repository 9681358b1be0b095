"""Questions about pictures: an agent is shown a card, turns it, and names both colours."""
