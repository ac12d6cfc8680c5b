"""What `longrein init` writes: the files of a small project, with MODULE and NAME to be filled."""
