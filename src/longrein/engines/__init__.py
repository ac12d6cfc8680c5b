"""Who samples: one file an engine, each with the `Engine` interface of `longrein.contract`."""
