"""The commands of `longrein`, one a file. A command imports what it needs when it runs, so that `longrein --help` is quick."""
