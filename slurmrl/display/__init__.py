"""Documents for users: ``document`` holds the blocks, ``text`` and ``svg`` render them.

``columns`` aligns text, also for commands that print without a document.

A command makes plain values, prints them with ``--json``, and turns them into a document for the
terminal or a picture. To add a kind of block, add its class to ``document`` and its renderer to the
table of ``text``, and to that of ``svg`` if it can be drawn.
"""
