"""The command line. Each command parses its options, calls the library and prints the result.

To add a command, write its function and add a line to ``main.COMMANDS``.
"""
