"""The tables of papers as recipes: what is run, and the published figures beside which ours are shown."""
