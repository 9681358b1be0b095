"""slime's interfaces, for a slime that trains on what the gateway records.

config         what slime's arguments say to Stepwell
data_source    slime's data sources: `RolloutDataSource`, `…WithBuffer`, and the pool's
dataset        prompts as samples, in slime's order: `Dataset`
rollout        slime's rollout function over the pool: `generate_rollout`
buffer         the same over the HTTP of a Rollout Buffer, without the pool's Ray cluster
pool           which rollout has which groups, settled by slime's checkpoints
generate       slime's generate functions as agents: Sample → function → Steps
engine_address what they call in place of an engine
masked         Steps of a sequence with a loss mask
filters        slime's filter functions as rules of a batch, and `check_reward_nonzero_std`
samples        whole samples, with texts, for filters and debug files
debug_data     debug files of slime's form
rm_hub         slime's rewards by its names: `async_rm`, `batched_async_rm`

In `trainer` since it needs the pool and the prompt source; backends see neither. Does not own:
samples (`backends/slime/`), slime's Rollout Buffer (`gateway/slime_buffer/`). Needs no slime.
"""
