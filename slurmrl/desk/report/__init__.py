"""One self-contained HTML file about trials: curves, story, time, checkpoints, samples, settings.

`collect` reads a run directory into a `TrialReport`, and `page` writes reports as a file that needs
no network. The charts are uPlot's, which lies in ``assets`` with its licence. To show something
more, add its field to `contents`, what reads it to `collect`, and what draws it to
``assets/page.js``.
"""
