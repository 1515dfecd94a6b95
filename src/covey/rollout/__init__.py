"""From tasks to scored groups: the engines that sample and the collector that runs agents on them."""
