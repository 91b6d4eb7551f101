"""Files that people upload and a runner looks into."""
