"""The command ``lightning-wlb``: one file per subcommand."""
