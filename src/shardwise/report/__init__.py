"""Plans, ledgers and run folders for people: a terminal page, one HTML page, pictures. Standard library only."""
