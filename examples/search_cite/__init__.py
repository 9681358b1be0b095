"""An agent that searches a small collection of documents, answers, and says where it read it."""
