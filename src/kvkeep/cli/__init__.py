"""The command line: `main` and one file per subcommand. Importing it is cheap; torch comes with the first real work."""
