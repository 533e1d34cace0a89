"""Use the objectives in other trainers: `trl`, `verl`, `skyrl`. Each module needs torch and the trainer's package."""
