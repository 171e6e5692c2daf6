"""The command line. `main` loads a subcommand's module only when it is asked for."""
