use super::insert::PAGES_AGAIN;
use super::*;
use crate::cache::pages::Pools;
use proptest::prelude::*;
use std::cmp::Reverse;

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
    assert_eq!(index.known(), 0, "not even the root is left");
}

/// What the lower tiers have lost is handed to them again, though it is on the device.
#[test]
fn lower_tiers_are_offered_what_they_do_not_hold() {
    for tiers in [true, false] {
        let (mut index, mut pools) = (index(4).with_tiers(tiers), Pools::new(16, 8));
        let inserted = visit(&mut index, &mut pools, &text(9), 2);
        assert!(inserted.stored.is_empty());
        let pages: Vec<Description> = inserted.pages.iter().map(|(p, _)| p.clone()).collect();
        let snapshot = inserted.snapshot.expect("room");
        assert!(snapshot.new);
        let state = snapshot.description.clone();
        let keys = [state.key, pages[1].key, pages[0].key];
        keys.iter().for_each(|key| index.set_stored(key));
        let again = visit(&mut index, &mut pools, &text(9), 2);
        assert_eq!((again.pages.len(), again.snapshot), (0, None));
        assert_eq!(again.stored, keys, "the beginning last");

        index.forget(&pages[0].key, &mut pools);
        index.forget(&state.key, &mut pools);
        assert_eq!(index.on_device(), (2, 1));
        // The caller's state reaches less far back than the one on the device.
        let again = visit(&mut index, &mut pools, &text(9), 1);
        assert_eq!(again.stored, [pages[1].key]);
        let offered: Vec<Description> = again.pages.iter().map(|(p, _)| p.clone()).collect();
        assert_eq!(offered, if tiers { vec![pages[0].clone()] } else { vec![] });
        let known = OfferedSnapshot { new: false, ..snapshot };
        assert_eq!(again.snapshot, tiers.then_some(known), "as it is on the device");
        assert_eq!(index.on_device(), (2, 1));
        check(&index);
        // One that reaches further back takes its place.
        let again = visit(&mut index, &mut pools, &text(9), 3);
        let lowest = again.snapshot.map(|s| (s.new, s.description.lowest));
        assert_eq!(lowest, Some((true, Some(6))));
        check(&index);
        index.clear(&mut pools);
        assert_eq!((pools.pages.used(), pools.slots.used()), (0, 0));
    }
}

/// Long texts that the lower tiers have lost come back to them a few pages at a time, the beginning
/// first; new pages are offered at once.
#[test]
fn lost_pages_are_offered_a_few_at_a_time() {
    let (mut index, mut pools) = (index(4).with_tiers(true), Pools::new(128, 8));
    let keys = |inserted: &Inserted| -> Vec<Key> {
        inserted.pages.iter().map(|(page, _)| page.key).collect()
    };
    let (len, more) = (PAGES_AGAIN + 3, 2 * PAGES_AGAIN);
    let all = keys(&visit(&mut index, &mut pools, &text(len * PAGE), 2));
    assert_eq!(all.len(), len);
    all.iter().for_each(|key| index.set_stored(key));
    all.iter().for_each(|key| index.forget(key, &mut pools));

    let longer = visit(&mut index, &mut pools, &text((len + more) * PAGE), 2);
    let offered = keys(&longer);
    assert_eq!(offered[..PAGES_AGAIN], all[..PAGES_AGAIN]);
    assert_eq!(offered.len(), PAGES_AGAIN + more);
    assert!(!all[PAGES_AGAIN..].iter().any(|key| offered.contains(key)));
    offered.iter().for_each(|key| index.set_stored(key));
    let last = keys(&visit(&mut index, &mut pools, &text(len * PAGE), 2));
    assert_eq!(last, all[PAGES_AGAIN..]);
    check(&index);
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

/// What is in the way of a hit goes, but not what the hit itself needs.
#[test]
fn a_pinned_hit_is_not_evicted() {
    // The snapshot lies in the page after the cut, at its end, or in the cut's own page.
    for len in [8, 9, 11] {
        let (mut index, mut pools) = (index(4), Pools::new(16, 8));
        visit(&mut index, &mut pools, &text(len), 2);
        let other: Vec<u32> = text(7).iter().map(|t| t + 50).collect();
        visit(&mut index, &mut pools, &other, 2);
        let longest = len - 1;
        let before = index.lookup(None, &text(len), longest);
        let hit = before.hit.clone().expect("found");
        hit.pin(&mut pools);
        assert_eq!(pools.pages.reclaimable(), 2, "those of the other text");
        assert_eq!(index.evict(usize::MAX, &mut pools), 2);
        index.evict_snapshot(&mut pools);
        assert!(index.lookup(None, &other, 6).hit.is_none());
        assert_eq!(index.lookup(None, &text(len), longest), before);
        hit.unpin(&mut pools);
        index.clear(&mut pools);
        assert_eq!((pools.pages.used(), pools.slots.used(), index.known()), (0, 0, 0));
    }
}

/// Clients choose salts: one that has nothing left must leave nothing.
#[test]
fn roots_go_with_what_hangs_under_them() {
    let (mut index, mut pools) = (index(2), Pools::new(16, 8));
    for i in 0..100 {
        let salt = i.to_string();
        // Too short for a page: there is but a snapshot, which the next ones push out.
        let page = pools.pages.take().expect("room");
        index.insert(Some(&salt), &text(3), &[page], Some(1), &mut pools);
        pools.pages.release(page);
        assert!(index.lookup(Some(&salt), &text(3), 2).hit.is_some());
        // Nothing is entered at all.
        index.insert(Some(&format!("{salt} again")), &text(3), &[], None, &mut pools);
        assert!(index.known() <= 4, "{} after {i}", index.known());
        check(&index);
    }
    // The only thing under its root is made anew, to be cut from earlier on.
    let page = pools.pages.take().expect("room");
    let inserted = index.insert(Some("99"), &text(3), &[page], Some(0), &mut pools);
    assert!(inserted.snapshot.is_some());
    pools.pages.release(page);
    index.clear(&mut pools);
    assert_eq!((index.known(), index.vacant.len()), (0, index.nodes.len()));

    // A state whose page is not known leaves no root, either.
    let (tokens, parent) = (Arc::from([1; 9]), [3; 16]);
    let entry = Description { key: [4; 16], parent, tokens, lowest: Some(1), at_root: true };
    assert!(!index.restore(&entry));
    assert_eq!(index.known(), 0);
}

/// What is in the order of use is what is on the device, and every root has something.
fn check(index: &PrefixIndex) {
    let nodes = || index.nodes.iter().enumerate().filter_map(|(id, n)| Some((id, n.as_ref()?)));
    let pages = nodes().filter(|(_, node)| node.page.is_some());
    let pages: BTreeSet<_> = pages.map(|(id, node)| (node.used, Reverse(node.end), id)).collect();
    assert_eq!(pages, index.pages_by_use);
    let mut snapshots = BTreeSet::new();
    for (id, node) in nodes() {
        let bare = node.children.is_empty() && node.snapshots.is_empty();
        assert!(node.parent.is_some() || !bare, "a bare root");
        for (tail, snapshot) in node.snapshots.iter().filter(|(_, s)| s.slot.is_some()) {
            snapshots.insert((snapshot.used, Reverse(snapshot.position), id, tail.clone()));
        }
    }
    assert_eq!(snapshots, index.snapshots_by_use);
}

proptest! {
    /// Random visits, lookups and evictions: what a lookup returns was entered, references add up,
    /// and everything is free at the end.
    #[test]
    fn counts_return_to_zero(
        ops in proptest::collection::vec(
            (0u8..5, proptest::collection::vec(0u32..2, 1..20), 0usize..4), 0..60),
        tiers in any::<bool>(),
    ) {
        let (mut index, mut pools) = (index(3).with_tiers(tiers), Pools::new(12, 6));
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
                        if slack == 2 {
                            hit.pin(&mut pools);
                            let can = pools.pages.reclaimable();
                            prop_assert_eq!(index.evict(usize::MAX, &mut pools), can);
                            let again = index.lookup(None, &text, longest).hit;
                            prop_assert_eq!(again.as_ref(), Some(&hit));
                            hit.unpin(&mut pools);
                        }
                        if slack == 3 {
                            missing.iter().for_each(|key| index.forget(key, &mut pools));
                        }
                    }
                }
                _ => {
                    let can = pools.pages.reclaimable();
                    match slack {
                        3 => prop_assert_eq!(index.evict(usize::MAX, &mut pools), can),
                        _ => prop_assert!(index.evict(slack, &mut pools) >= slack.min(can)),
                    }
                }
            }
            check(&index);
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
