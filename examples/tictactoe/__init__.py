"""A game of several turns against an environment: TextArena's TicTacToe."""
