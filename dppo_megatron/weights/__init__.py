"""What trainer and engines both read of a published policy: its manifest, its marker, its process group."""
