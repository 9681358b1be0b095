"""Rollouts: agents run on the tasks of `data`, n times each, bounded and timed.

producer   which prompts, when, and what becomes of their groups
worker     a process that runs agents
gateway    the gateway as a worker asks it
agents     finds `rollout.agent`
harness    runs `rollout.harness`, a command
sandboxes  where commands run: processes, bubblewrap, containers
"""
