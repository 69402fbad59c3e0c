"""Do the recipes mean what they say?"""
