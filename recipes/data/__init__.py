"""Where does the text of a recipe come from, and which rank reads which tokens when?"""
