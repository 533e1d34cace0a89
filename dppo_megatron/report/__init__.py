"""Records a run: metrics, trackers, console progress, logs and the text report. The HTML page is `lab.view`."""
