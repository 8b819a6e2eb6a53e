"""A self-contained HTML file: curves, incarnations, times, checkpoints, samples, settings.

`collecting` reads a run directory into a `TrialReport`, and `page` writes reports as a file that
needs no network. The charts use uPlot, which is in ``assets`` with its license. To show more
data, add the field to `report_data`, its reader to `collecting`, and its view to
``assets/page.js``.
"""
