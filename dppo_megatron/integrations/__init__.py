"""Use the objectives in other trainers: `trl`, `verl`, `skyrl`. Each needs torch and the package of its name."""
