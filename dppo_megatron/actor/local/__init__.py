"""Provides the layers of Megatron's local spec, which are used without TransformerEngine, on CPUs and GPUs.

The path of one micro-batch:

data/micro_batches   plans which sequences go together; samples of one prompt stay in one micro-batch
data/packing         packs them end to end: prompt | sample 1 | sample 2 (a shared prompt once)
actor/batch/prefixes first row and length of the prompt that each segment continues
local/segments       which rows are padded side by side for one attention call, and each segment's keys
local/attention      attention over that plan (`actor/flash` on GPUs in 16 bits, without padding)
"""
