"""Provides the layers for Megatron's local spec, used without TransformerEngine on CPUs and GPUs.

A micro-batch takes this path:

data.micro_batches   plans which sequences go together; samples of a prompt stay in one micro-batch
data.packing         packs sequences end to end: prompt | sample 1 | sample 2 (a shared prompt once)
batch.prefixes       finds the first row and the length of the prompt that each segment continues
batch.segments       plans which rows are padded side by side for an attention call, and each segment's keys
local.attention      computes attention over this plan (`local.flash` on GPUs in 16 bits, without padding)
"""
