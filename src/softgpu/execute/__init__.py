"""Instruction families: each module registers the emitters of its opcodes (see ``softgpu.translate.emits``)."""
