"""Documents for users. `terminal` defines their blocks and renders them as text, `svg` draws them.

A command makes plain values, prints them with ``--json``, and turns them into a document for the
terminal or a picture. To add a kind of block, add its class and a case of ``_block`` to `terminal`,
and a case of ``render`` to `svg` if the block can be drawn.
"""
