//! Masks, drafts, rollback and triggers.

mod grammar_util;

use std::sync::Arc;

use deepinfer::grammar::{GrammarSpec, MatchError, Matcher, Trigger};
use grammar_util::{Rng, SMALL, Small, allowed, allows, byte_tokens, mask};
use proptest::prelude::*;
use serde_json::json;

fn specs() -> Vec<GrammarSpec> {
    let record = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "kind": {"enum": ["tree", "true", "trunk"]},
            "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            "n": {"type": "number", "minimum": -3, "exclusiveMaximum": 12.5}
        },
        "required": ["name", "next"]
    });
    vec![
        GrammarSpec::JsonSchema(record),
        GrammarSpec::JsonObject,
        GrammarSpec::Regex("(ab|abc|日本?)*[0-9]{2,}x?".into()),
        GrammarSpec::Choice(["true", "tru", "name", "names", ""].map(str::to_owned).to_vec()),
        GrammarSpec::Lark(
            "start: item (\",\" item)*\nitem: WORD | \"[\" item \"]\" | <other>\nWORD: /[a-c]+/"
                .into(),
        ),
    ]
}

/// Tokens of a random walk, each allowed after the ones before.
fn walk(matcher: &mut Matcher, rng: &mut Rng, steps: usize) -> Vec<u32> {
    let mut tokens = Vec::new();
    for _ in 0..steps {
        let mask = mask(matcher, &SMALL.vocabulary);
        let allowed: Vec<u32> = allowed(&mask).into_iter().filter(|t| *t != SMALL.eos).collect();
        let token = if allowed.is_empty() { SMALL.eos } else { *rng.pick(&allowed) };
        matcher.accept(token).unwrap();
        tokens.push(token);
    }
    tokens
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// A set bit and a token that is accepted are the same, in every state.
    #[test]
    fn mask_is_what_is_accepted(spec in 0usize..5, seed: u64, steps in 0usize..25) {
        let mut matcher = SMALL.matcher(specs().swap_remove(spec));
        let tokens = walk(&mut matcher, &mut Rng::new(seed), steps);
        let mask = mask(&mut matcher, &SMALL.vocabulary);
        for token in 0..SMALL.vocabulary.size() as u32 {
            let accepted = matcher.validate(&[token]).unwrap() == 1;
            prop_assert_eq!(allows(&mask, token), accepted, "{} after {:?}", token, tokens);
        }
        let beyond: Vec<u32> = allowed(&mask).into_iter()
            .filter(|t| *t as usize >= SMALL.vocabulary.size()).collect();
        prop_assert!(beyond.is_empty());
    }

    /// Going somewhere and coming back is never having gone there.
    #[test]
    fn rollback(spec in 0usize..5, seed: u64, steps in 0usize..20, more in 0usize..12) {
        let mut rng = Rng::new(seed);
        let mut matcher = SMALL.matcher(specs().swap_remove(spec));
        let tokens = walk(&mut matcher, &mut rng, steps);
        let before = mask(&mut matcher, &SMALL.vocabulary);
        let finished = matcher.is_finished();
        walk(&mut matcher, &mut rng, more);
        matcher.rollback(more).unwrap();
        prop_assert_eq!(matcher.len(), steps);
        prop_assert_eq!(matcher.is_finished(), finished);
        prop_assert_eq!(&mask(&mut matcher, &SMALL.vocabulary), &before);
        let mut fresh = SMALL.matcher(specs().swap_remove(spec));
        fresh.replay(&tokens).unwrap();
        prop_assert_eq!(&mask(&mut fresh, &SMALL.vocabulary), &before);
        // And from there on both go the same way.
        for _ in 0..5 {
            let step = walk(&mut matcher, &mut rng, 1);
            fresh.replay(&step).unwrap();
            prop_assert_eq!(mask(&mut fresh, &SMALL.vocabulary), mask(&mut matcher, &SMALL.vocabulary));
        }
    }

    /// Drafts, right and wrong: counting them at once is accepting them one by one, and the
    /// masks of all rows are those met on the way.
    #[test]
    fn drafts(spec in 0usize..5, seed: u64, steps in 0usize..15, right in 0usize..6, wrong: u32) {
        let mut rng = Rng::new(seed);
        let mut matcher = SMALL.matcher(specs().swap_remove(spec));
        let tokens = walk(&mut matcher, &mut rng, steps);
        let mut drafts = walk(&mut matcher, &mut rng, right);
        matcher.rollback(right).unwrap();
        drafts.push(wrong % (SMALL.vocabulary.size() as u32 + 3));
        drafts.push(b'a'.into());

        let mut one_by_one = SMALL.matcher(specs().swap_remove(spec));
        one_by_one.replay(&tokens).unwrap();
        let words = SMALL.vocabulary.mask_words();
        let mut expected = vec![mask(&mut one_by_one, &SMALL.vocabulary)];
        let mut count = 0;
        for &draft in &drafts {
            if one_by_one.accept(draft).is_err() {
                break;
            }
            count += 1;
            expected.push(mask(&mut one_by_one, &SMALL.vocabulary));
        }
        expected.resize(drafts.len() + 1, vec![u32::MAX; words]);

        prop_assert!(count >= right);
        prop_assert_eq!(matcher.validate(&drafts).unwrap(), count);
        let mut rows = vec![0; words * (drafts.len() + 1)];
        prop_assert_eq!(matcher.masks(&drafts, &mut rows).unwrap(), count);
        prop_assert_eq!(rows, expected.concat());
        prop_assert_eq!(matcher.len(), steps);
    }

    /// Forced tokens are allowed one after the other, and asking for them changes nothing.
    #[test]
    fn forced_tokens(spec in 0usize..5, seed: u64, steps in 0usize..20) {
        let mut matcher = SMALL.matcher(specs().swap_remove(spec));
        walk(&mut matcher, &mut Rng::new(seed), steps);
        let before = mask(&mut matcher, &SMALL.vocabulary);
        let forced = matcher.forced().unwrap();
        prop_assert_eq!(&mask(&mut matcher, &SMALL.vocabulary), &before);
        prop_assert_eq!(matcher.validate(&forced).unwrap(), forced.len());
        let mut fork = matcher.fork().unwrap();
        fork.replay(&forced).unwrap();
        prop_assert_eq!(&mask(&mut matcher, &SMALL.vocabulary), &before);
    }
}

#[test]
fn forced_text_is_found() {
    let spec = json!({"type": "object", "properties": {"name": {"const": "abc"}},
        "required": ["name"], "additionalProperties": false});
    let mut matcher = SMALL.matcher(GrammarSpec::Regex("key=[0-9]".into()));
    assert_eq!(SMALL.text(&matcher.forced().unwrap()), b"key=");
    matcher.replay(&byte_tokens("key=")).unwrap();
    assert!(matcher.forced().unwrap().is_empty());
    let mut matcher = SMALL.matcher(GrammarSpec::JsonSchema(spec));
    matcher.replay(&byte_tokens("{\"")).unwrap();
    assert_eq!(SMALL.text(&matcher.forced().unwrap()), b"name\"");
}

#[test]
fn after_the_end_only_the_end() {
    let mut matcher = SMALL.matcher(GrammarSpec::Choice(vec!["ab".into()]));
    assert!(matcher.is_active() && !matcher.is_finished());
    assert!(!allows(&mask(&mut matcher, &SMALL.vocabulary), SMALL.eos));
    matcher.replay(&byte_tokens("ab")).unwrap();
    for _ in 0..3 {
        assert!(matcher.is_finished());
        assert_eq!(allowed(&mask(&mut matcher, &SMALL.vocabulary)), [SMALL.eos]);
        assert_eq!(matcher.validate(&[b'a'.into()]), Ok(0));
        matcher.accept(SMALL.eos).unwrap();
    }
    matcher.rollback(4).unwrap();
    assert_eq!(matcher.validate(&byte_tokens("bc")), Ok(1));
    // Where the text may end but need not, both are allowed.
    let mut matcher = SMALL.matcher(GrammarSpec::Regex("a+".into()));
    matcher.accept(b'a'.into()).unwrap();
    let both = mask(&mut matcher, &SMALL.vocabulary);
    assert!(allows(&both, SMALL.eos) && allows(&both, b'a'.into()) && !matcher.is_finished());
}

#[test]
fn wrong_calls_change_nothing() {
    let mut matcher = SMALL.matcher(GrammarSpec::Regex("ab*".into()));
    matcher.accept(b'a'.into()).unwrap();
    let before = mask(&mut matcher, &SMALL.vocabulary);
    assert_eq!(
        matcher.accept(b'x'.into()),
        Err(MatchError::Rejected { token: b'x'.into(), position: 1 })
    );
    let vocab = SMALL.vocabulary.size();
    assert_eq!(matcher.accept(9999), Err(MatchError::OutOfRange { token: 9999, vocab }));
    assert_eq!(matcher.rollback(2), Err(MatchError::Rollback { asked: 2, have: 1 }));
    assert!(matches!(matcher.mask(&mut [0]), Err(MatchError::MaskSize { got: 1, .. })));
    assert!(matches!(matcher.masks(&[1], &mut [0]), Err(MatchError::MaskSize { got: 1, .. })));
    // Special tokens are no text, not even where any text goes.
    let mut any = SMALL.matcher(GrammarSpec::Regex("(?s:.*)".into()));
    assert_eq!(any.validate(&[SMALL.think_end]), Ok(0));
    assert_eq!(any.validate(&byte_tokens("</think>")), Ok(8));
    assert_eq!(mask(&mut matcher, &SMALL.vocabulary), before);
}

#[test]
fn forks_go_their_own_ways() {
    let mut one = SMALL.matcher(GrammarSpec::Regex("a(b|c)*".into()));
    one.accept(b'a'.into()).unwrap();
    let mut two = one.fork().unwrap();
    one.replay(&byte_tokens("bb")).unwrap();
    two.replay(&byte_tokens("c")).unwrap();
    assert_eq!((one.len(), two.len()), (3, 2));
    two.rollback(2).unwrap();
    assert_eq!(two.validate(&byte_tokens("b")), Ok(0));
    assert_eq!(one.validate(&byte_tokens("b")), Ok(1));
}

fn thinking(small: &Small, spec: GrammarSpec, trigger: Trigger) -> Matcher {
    small.compile(spec).unwrap().matcher(Some(Arc::new(trigger))).unwrap()
}

fn after_think() -> Trigger {
    Trigger::new(vec![SMALL.think_end], None).unwrap()
}

/// The end of thinking at every offset of a block of drafts.
#[test]
fn a_trigger_inside_a_block_of_drafts() {
    let answer = byte_tokens("{\"a\":1}");
    for k in 1..=6 {
        for offset in 0..=k {
            let mut matcher = thinking(&SMALL, GrammarSpec::JsonObject, after_think());
            matcher.replay(&byte_tokens("so: {")).unwrap();
            // `offset` tokens of thought, the end of thinking, then the answer.
            let stream: Vec<u32> = byte_tokens(&"thinks"[..offset])
                .into_iter()
                .chain([SMALL.think_end])
                .chain(answer.clone())
                .collect();
            let drafts = &stream[..k];
            let mut rows = vec![0; SMALL.vocabulary.mask_words() * (k + 1)];
            assert_eq!(matcher.masks(drafts, &mut rows), Ok(k), "offset {offset} of {k}");
            assert_eq!(matcher.validate(drafts), Ok(k));
            for (i, row) in rows.chunks(SMALL.vocabulary.mask_words()).enumerate() {
                let thinking = i <= offset;
                // Before: anything but the end of the sequence. After: as the grammar says.
                if thinking {
                    assert!(allows(row, b'}'.into()) && allows(row, b'x'.into()));
                }
                assert_eq!(allows(row, SMALL.think_end), thinking);
                assert!(!allows(row, SMALL.eos));
                if !thinking {
                    let mut plain = SMALL.matcher(GrammarSpec::JsonObject);
                    plain.replay(&answer[..i - offset - 1]).unwrap();
                    assert_eq!(row, mask(&mut plain, &SMALL.vocabulary));
                }
            }
            // A draft that breaks the grammar right after the end of thinking is not counted.
            let mut broken = drafts.to_vec();
            if offset + 1 < k {
                broken[offset + 1] = b'x'.into();
                assert_eq!(matcher.validate(&broken), Ok(offset + 1));
            }
            // All of it, in this block and after.
            matcher.replay(&stream).unwrap();
            assert!(matcher.is_finished());
            // Back into the thought.
            matcher.rollback(stream.len() - offset).unwrap();
            assert!(!matcher.is_active());
            assert_eq!(matcher.validate(&byte_tokens("x")), Ok(1));
        }
    }
}

#[test]
fn the_tag_as_text_does_not_trigger() {
    let mut matcher = thinking(&SMALL, GrammarSpec::JsonObject, after_think());
    matcher.replay(&byte_tokens("the tag </think> ends it")).unwrap();
    assert!(!matcher.is_active());
    assert_eq!(matcher.validate(&[SMALL.eos]), Ok(0), "no end inside a thought");
    matcher.accept(SMALL.think_end).unwrap();
    assert!(matcher.is_active());
    assert_eq!(matcher.validate(&byte_tokens("x")), Ok(0));
    assert_eq!(matcher.validate(&byte_tokens("{}")), Ok(2));
    // A second tag is not part of an answer.
    assert_eq!(matcher.validate(&[SMALL.think_end]), Ok(0));
}

#[test]
fn sequences_that_overlap_themselves() {
    let (a, b) = (u32::from(b'a'), u32::from(b'b'));
    let trigger = Trigger::new(vec![a, a, b], None).unwrap();
    let mut matcher = thinking(&SMALL, GrammarSpec::Regex("x".into()), trigger);
    for token in [a, b, a, a, a] {
        matcher.accept(token).unwrap();
        assert!(!matcher.is_active());
    }
    matcher.accept(b).unwrap();
    assert!(matcher.is_active());
    assert_eq!(matcher.validate(&byte_tokens("x")), Ok(1));
    matcher.rollback(2).unwrap();
    assert_eq!(matcher.validate(&[b, u32::from(b'x')]), Ok(2));
    assert_eq!(matcher.validate(&[a, b, u32::from(b'x')]), Ok(3));
}

#[test]
fn a_bound_token_forces_the_rest() {
    let (a, b, c) = (u32::from(b'a'), u32::from(b'b'), u32::from(b'c'));
    for (bound, sequence) in [(c, vec![a, b, a]), (a, vec![a, b])] {
        let trigger = Trigger::new(sequence.clone(), Some(bound)).unwrap();
        let mut matcher = thinking(&SMALL, GrammarSpec::Regex("x".into()), trigger);
        matcher.accept(b'z'.into()).unwrap();
        matcher.accept(bound).unwrap();
        let rest = if bound == a { &sequence[1..] } else { &sequence[..] };
        assert_eq!(matcher.forced().unwrap(), rest);
        for &token in rest {
            assert_eq!(allowed(&mask(&mut matcher, &SMALL.vocabulary)), [token]);
            assert_eq!(matcher.validate(&[b'z'.into()]), Ok(0));
            matcher.accept(token).unwrap();
        }
        assert!(matcher.is_active());
        matcher.rollback(rest.len() + 1).unwrap();
        assert_eq!(matcher.validate(&[b'z'.into()]), Ok(1), "the bound token is forgotten");
    }
}

#[test]
fn thinking_ends_at_a_budget() {
    let mut matcher = thinking(&SMALL, GrammarSpec::JsonObject, after_think());
    matcher.replay(&byte_tokens("hm")).unwrap();
    matcher.force_trigger();
    assert_eq!(allowed(&mask(&mut matcher, &SMALL.vocabulary)), [SMALL.think_end]);
    assert_eq!(matcher.validate(&[SMALL.think_end, b'{'.into()]), Ok(2));
    matcher.rollback(1).unwrap();
    assert_eq!(matcher.validate(&byte_tokens("m")), Ok(1));
    matcher.force_trigger();
    matcher.accept(SMALL.think_end).unwrap();
    matcher.force_trigger();
    assert_eq!(matcher.validate(&byte_tokens("{}")), Ok(2));
}

/// Masks may be computed on a worker thread.
#[test]
fn matchers_move_between_threads() {
    let mut matcher = SMALL.matcher(GrammarSpec::Regex("ab".into()));
    matcher.accept(b'a'.into()).unwrap();
    let (mut matcher, found) = std::thread::spawn(move || {
        let found = allowed(&mask(&mut matcher, &SMALL.vocabulary));
        (matcher, found)
    })
    .join()
    .unwrap();
    assert!(found.contains(&b'b'.into()));
    matcher.accept(b'b'.into()).unwrap();
}

/// A matcher that is rebuilt from the tokens goes on as the one that was dropped.
#[test]
fn rebuilt_from_its_tokens() {
    let stream: Vec<u32> = byte_tokens("why")
        .into_iter()
        .chain([SMALL.think_end])
        .chain(byte_tokens("{\"a\":["))
        .collect();
    for cut in 0..=stream.len() {
        let mut kept = thinking(&SMALL, GrammarSpec::JsonObject, after_think());
        kept.replay(&stream).unwrap();
        let mut rebuilt = thinking(&SMALL, GrammarSpec::JsonObject, after_think());
        rebuilt.replay(&stream[..cut]).unwrap();
        rebuilt.replay(&stream[cut..]).unwrap();
        assert_eq!(mask(&mut kept, &SMALL.vocabulary), mask(&mut rebuilt, &SMALL.vocabulary));
    }
}

/// Sequences after many others of the same grammar are told what the first was: one that met every
/// mask on its way, and one that takes the same tokens at once.
#[test]
fn sequences_leave_nothing_to_later_ones() {
    for seed in 0..1500 {
        let spec = || specs().swap_remove(4);
        let mut walked = SMALL.matcher(spec());
        let tokens = walk(&mut walked, &mut Rng::new(seed), 14);
        let mut taken = SMALL.matcher(spec());
        taken.replay(&tokens).unwrap();
        let masks = [&mut walked, &mut taken].map(|matcher| mask(matcher, &SMALL.vocabulary));
        assert_eq!(masks[0], masks[1], "seed {seed}, after {tokens:?}");
    }
}

/// Going back again and again, now and then to the beginning, leaves nothing either.
#[test]
fn many_ways_back() {
    for seed in 0..100 {
        let mut rng = Rng::new(seed);
        let spec = || specs().swap_remove(seed as usize % 5);
        let mut matcher = SMALL.matcher(spec());
        let mut tokens: Vec<u32> = Vec::new();
        for _ in 0..40 {
            let more = rng.below(8);
            tokens.extend(walk(&mut matcher, &mut rng, more));
            let back = match rng.below(6) {
                0 => tokens.len(),
                _ => rng.below(8).min(tokens.len()),
            };
            matcher.rollback(back).unwrap();
            tokens.truncate(tokens.len() - back);
            let mut fresh = SMALL.matcher(spec());
            fresh.replay(&tokens).unwrap();
            let masks = [&mut matcher, &mut fresh].map(|m| mask(m, &SMALL.vocabulary));
            assert_eq!(masks[0], masks[1], "seed {seed}, after {tokens:?}");
        }
    }
}
