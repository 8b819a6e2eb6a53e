"""One self-contained HTML file about trials: curves, story, time, checkpoints, samples, settings.

`collecting` reads a run directory into a `TrialReport`, and `page` writes reports as a file that
needs no network. The charts are uPlot's, which lies in ``assets`` with its license. To show
something more, add its field to `report_data`, what reads it to `collecting`, and what draws it to
``assets/page.js``.
"""
