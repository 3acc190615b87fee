"""The pages that people look at: what they show, and how. Pure: documents in, HTML out; `farm.api.page_routes` serves
them.
"""
