"""The command line: parse, call one library function, print, map one base error to an exit code.

A new command is one file and one line in ``main.COMMANDS``.
"""
