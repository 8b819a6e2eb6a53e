"""Documents for users: ``document`` holds the blocks, ``text`` and ``svg`` render them.

``columns`` aligns text, for commands without a document too.

A command makes plain values, prints them with ``--json``, and turns them into a document for the
terminal or a picture. To add a kind of block, add its class to ``document`` and its renderer to the
table of ``text``, and to the table of ``svg`` if it can be drawn.
"""
