"""Looking inside models: what they see, how they attend, what they represent, and how fast they are."""
