"""How long a plan takes, and what it holds at each instruction."""
