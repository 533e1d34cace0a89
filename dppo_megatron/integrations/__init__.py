"""Our objectives inside other trainers: `trl`, `verl`, `skyrl`. Each needs torch and the package it is named after."""
