"""Extensions that come with the farm. Each imports the core; the core imports none, and works without this folder."""
