"""One folder a method: config, run, claims, bench, README and notebook; `datasets` is shared."""
