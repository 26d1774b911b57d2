use super::*;
use crate::cache::pages::Pools;
use proptest::prelude::*;

const PAGE: usize = 4;

fn index(snapshots: usize) -> PrefixIndex {
    PrefixIndex::new(PAGE, snapshots, b"test")
}

/// Runs a text through the pools as a sequence would, and enters it with a snapshot at its end.
fn visit(index: &mut PrefixIndex, pools: &mut Pools, text: &[u32], slack: usize) -> Inserted {
    let pages: Vec<u32> =
        (0..text.len().div_ceil(PAGE)).map(|_| pools.pages.take().expect("room")).collect();
    let lowest = text.len().saturating_sub(slack);
    let inserted = index.insert(None, text, &pages, Some(lowest), pools);
    pages.iter().for_each(|&page| pools.pages.release(page));
    inserted
}

fn text(len: usize) -> Vec<u32> {
    (0..len as u32).collect()
}

#[test]
fn a_repeated_text_is_found_up_to_its_last_token() {
    for len in 2..14 {
        let (mut index, mut pools) = (index(4), Pools::new(16, 8));
        visit(&mut index, &mut pools, &text(len), 2);
        let lookup = index.lookup(None, &text(len), len - 1);
        let hit = lookup.hit.expect("found");
        assert_eq!(lookup.shared, len);
        assert_eq!(hit.cut, len - 1);
        assert_eq!(hit.pages.len(), (len - 1) / PAGE);
        assert_eq!(hit.open.is_some(), (len - 1) % PAGE != 0);
        assert!(index.lookup(Some("other"), &text(len), len - 1).hit.is_none());
    }
}

#[test]
fn a_text_that_goes_on_starts_at_the_snapshot() {
    let (mut index, mut pools) = (index(4), Pools::new(16, 8));
    visit(&mut index, &mut pools, &text(9), 2);
    let lookup = index.lookup(None, &text(15), 14);
    assert_eq!(lookup.hit.map(|h| h.cut), Some(9));
    assert_eq!(lookup.shared, 9);
}

#[test]
fn the_third_visitor_of_a_shared_prefix_hits() {
    let (mut index, mut pools) = (index(4), Pools::new(32, 8));
    let with_end = |end: u32| -> Vec<u32> {
        text(10).into_iter().chain((0..6).map(|i| 100 * end + i)).collect()
    };
    visit(&mut index, &mut pools, &with_end(1), 2);
    let second = index.lookup(None, &with_end(2), 15);
    assert_eq!((second.hit, second.shared), (None, 10));
    visit(&mut index, &mut pools, &with_end(2)[..10], 0);
    let third = index.lookup(None, &with_end(3), 15);
    assert_eq!(third.hit.map(|h| h.cut), Some(10));
}

#[test]
fn evicted_entries_survive_only_where_they_are_stored() {
    let (mut index, mut pools) = (index(4), Pools::new(8, 8));
    let inserted = visit(&mut index, &mut pools, &text(9), 2);
    let state = inserted.snapshot.expect("room").description;
    assert_eq!(inserted.pages.len(), 2);
    index.set_stored(&state.key);
    for (page, _) in &inserted.pages {
        index.set_stored(&page.key);
    }
    assert_eq!(index.evict(8, &mut pools), 3);
    assert_eq!((pools.pages.used(), pools.slots.used()), (0, 0));
    let hit = index.lookup(None, &text(9), 8).hit.expect("stored");
    assert_eq!(hit.state, Place::Stored(state.key));
    assert_eq!(
        hit.pages,
        inserted.pages.iter().map(|(p, _)| Place::Stored(p.key)).collect::<Vec<_>>()
    );

    index.forget(&inserted.pages[0].0.key, &mut pools);
    assert!(index.lookup(None, &text(9), 8).hit.is_none());
    assert_eq!(index.by_key.len(), 1, "only the root is left");
}

#[test]
fn entries_are_restored_from_their_descriptions() {
    let (mut index, mut pools) = (index(4), Pools::new(8, 8));
    let inserted = visit(&mut index, &mut pools, &text(9), 2);
    let state = inserted.snapshot.expect("room").description;
    let mut other = PrefixIndex::new(PAGE, 4, b"test");
    assert!(!other.restore(&state), "its parent is unknown");
    for (page, _) in &inserted.pages {
        assert!(other.restore(page));
    }
    assert!(other.restore(&state));
    assert_eq!(other.lookup(None, &text(9), 8).hit.map(|h| h.cut), Some(8));

    let mut wrong = inserted.pages[0].0.clone();
    wrong.tokens = text(PAGE).iter().map(|t| t + 1).collect();
    assert!(!other.restore(&wrong), "the key does not name these tokens");
    let mut elsewhere = PrefixIndex::new(PAGE, 4, b"another model");
    elsewhere.restore(&inserted.pages[0].0);
    assert_eq!(elsewhere.lookup(None, &text(9), 8), Lookup::default());
}

proptest! {
    /// Random visits, lookups and evictions: what a lookup returns was entered, references add up,
    /// and everything is free at the end.
    #[test]
    fn counts_return_to_zero(
        ops in proptest::collection::vec(
            (0u8..5, proptest::collection::vec(0u32..2, 1..20), 0usize..4), 0..60),
    ) {
        let (mut index, mut pools) = (index(3), Pools::new(12, 6));
        let mut entered: Vec<Vec<u32>> = Vec::new();
        let mut running: Vec<Vec<u32>> = Vec::new();
        for (op, text, slack) in ops {
            match op {
                0 | 1 => {
                    let wanted = text.len().div_ceil(PAGE);
                    let free = pools.pages.available();
                    index.evict(wanted.saturating_sub(free), &mut pools);
                    if pools.pages.available() < wanted {
                        continue;
                    }
                    let pages: Vec<u32> =
                        (0..wanted).filter_map(|_| pools.pages.take()).collect();
                    let lowest = text.len().saturating_sub(slack);
                    let inserted =
                        index.insert(None, &text, &pages, Some(lowest), &mut pools);
                    if slack % 2 == 0 {
                        for (page, _) in &inserted.pages {
                            index.set_stored(&page.key);
                        }
                        if let Some(snapshot) = &inserted.snapshot {
                            index.set_stored(&snapshot.description.key);
                        }
                    }
                    entered.push(text);
                    running.push(pages);
                }
                2 => if let Some(pages) = running.pop() {
                    pages.iter().for_each(|&page| pools.pages.release(page));
                },
                3 => {
                    let longest = text.len() - 1;
                    let lookup = index.lookup(None, &text, longest);
                    if let Some(hit) = lookup.hit {
                        prop_assert!(hit.cut <= longest && hit.cut <= lookup.shared);
                        prop_assert_eq!(hit.pages.len(), hit.cut / PAGE);
                        let known = |t: &Vec<u32>| t.starts_with(&text[..hit.cut]);
                        prop_assert!(entered.iter().any(known));
                        let mut missing = Vec::new();
                        for place in hit.pages.iter().chain(&hit.open).chain([&hit.state]) {
                            match place {
                                Place::Device(_) => {}
                                Place::Stored(key) => missing.push(*key),
                            }
                        }
                        if slack == 3 {
                            missing.iter().for_each(|key| index.forget(key, &mut pools));
                        }
                    }
                }
                _ => {
                    index.evict(slack, &mut pools);
                }
            }
            let (pages, snapshots) = index.on_device();
            prop_assert!(snapshots <= 3);
            prop_assert_eq!(pools.slots.used(), snapshots);
            prop_assert!(pools.pages.used() >= pages.min(1));
        }
        for pages in running {
            pages.iter().for_each(|&page| pools.pages.release(page));
        }
        index.clear(&mut pools);
        prop_assert_eq!(pools.pages.used(), 0);
        prop_assert_eq!(pools.slots.used(), 0);
    }
}
