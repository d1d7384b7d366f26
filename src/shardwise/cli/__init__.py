"""The command line: a lazy table of commands, and one thin file for each."""
