"""The command line: `main`, and a room or a file for each subcommand. Importing it does not import torch."""
