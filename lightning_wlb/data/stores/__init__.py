"""Document stores over memory-mapped files, one file for each kind.

:func:`~lightning_wlb.data.open_documents.documents` chooses the store by the source.
"""
