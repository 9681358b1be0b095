"""A run: its folder, and what starts, trains, serves, resumes and changes it."""
