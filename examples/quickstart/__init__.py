"""The quickstart: an agent with a calculator, and a tiny model that learns to reach for it."""
