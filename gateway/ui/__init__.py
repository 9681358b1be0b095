"""This room serves the dashboard at `/ui`, so that people see what agents did, what was trained on,
and why the system waits.

    browser ──► router.py ──► dashboard.py ──► pool (listings, events, marks)
                  │ static/        │ └───────► run_folder.py: metrics.jsonl, trained/
                  │                └─────────► live.py: one tick a second, while somebody looks
                  └ the pages: ES modules without a build step

The pages show what an agent wrote as text, never as markup. Does not own access (`access.py`).
"""
