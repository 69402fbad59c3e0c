"""Does a Lightning Trainer train a sharded model as it trains any other?"""
