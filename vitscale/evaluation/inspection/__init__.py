"""Looking inside models: what they see, how they attend and what they represent."""
