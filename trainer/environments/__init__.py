"""Environments of others, as agents: a rollout is an episode of theirs.

openenv              an OpenEnv server, by its `reset` and `step`
verifiers_episode    one episode of a `verifiers` environment, run by the Python that has it
"""
