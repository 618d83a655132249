"""Packing methods: one file each."""
