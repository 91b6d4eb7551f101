"""The relay's own code on a virtual clock, with several nodes, a fake database and fake receivers."""
