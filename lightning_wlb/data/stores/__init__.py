"""Document stores over memory-mapped files, one file for each kind.

:func:`~lightning_wlb.data.open_documents.documents` opens them by what it finds.
"""
