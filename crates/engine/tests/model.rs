//! The guarantee, on the whole model: a token's bits depend on its sequence alone, not on chunks,
//! neighbours, threads, rejected drafts, or having been saved and restored.

mod common;
mod modes;
mod random;

use common::{FORMATS, all, bits, random_tokens, run_chunks, session};
use deepinfer::model::NoProbe;
use deepinfer::plan::StepPlan;
use deepinfer::session::{GreedyDrafts, Session};
use deepinfer_device::cpu::Cpu;

/// Ordinary tokens of the golden vocabulary (specials and the image token come later).
const VOCAB: u32 = 512;

#[test]
fn chunks_give_the_bits_of_one_pass() {
    let tokens = random_tokens(1, 300, VOCAB);
    for format in FORMATS {
        let whole = run_chunks(&mut session(format, 1, 1), 0, &tokens, 300);
        for chunk in [1, 7, 64, 127, 128, 129] {
            let chunked = run_chunks(&mut session(format, 1, 2), 0, &tokens, chunk);
            for (p, (a, b)) in whole.iter().zip(&chunked).enumerate() {
                assert_eq!(a, b, "{format:?}, chunks of {chunk}, position {p}");
            }
        }
    }
}

#[test]
fn neighbours_do_not_change_a_sequence() {
    let texts: Vec<Vec<u32>> =
        (0..5).map(|i| random_tokens(10 + i, 40 + 37 * i as usize, VOCAB)).collect();
    for format in FORMATS {
        let alone: Vec<_> =
            texts.iter().map(|t| run_chunks(&mut session(format, 1, 1), 0, t, 512)).collect();
        let mut together = session(format, 5, 2);
        let mut at = [0usize; 5];
        let mut out: Vec<Vec<Vec<u32>>> = vec![Vec::new(); 5];
        // Uneven pieces, in an order of slots that changes from step to step.
        for step in 0.. {
            let mut sequences = Vec::new();
            let mut order = Vec::new();
            for k in 0..5 {
                let slot = (k * 2 + step) % 5;
                let n = (1 + (slot + step) % 3 * 17).min(texts[slot].len() - at[slot]);
                if n == 0 {
                    continue;
                }
                let part = texts[slot][at[slot]..at[slot] + n].to_vec();
                sequences.push(together.extend(slot, &part, &all(n)));
                order.push((slot, n));
                at[slot] += n;
            }
            if sequences.is_empty() {
                break;
            }
            let mut logits = bits(together.run(&StepPlan { sequences }, &mut NoProbe).unwrap());
            for (slot, n) in order {
                out[slot].extend(logits.drain(..n));
            }
        }
        assert_eq!(alone, out, "{format:?}");
    }
}

#[test]
fn rejected_drafts_leave_no_trace() {
    let tokens = random_tokens(3, 90, VOCAB);
    for format in FORMATS {
        let clean = run_chunks(&mut session(format, 1, 1), 0, &tokens, 1);
        // Every acceptance count at every position: around the window (8), page-free, and at both
        // residues of the ratio.
        for accepted in 0..=5usize {
            for first in [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 30, 31] {
                let mut s = session(format, 1, 1);
                run_chunks(&mut s, 0, &tokens[..first], 64);
                let mut at = first;
                let mut round = 0;
                while at + 6 <= tokens.len() && round < 6 {
                    // The right tokens up to the accepted count, wrong ones after it.
                    let mut block = tokens[at..at + 6].to_vec();
                    for wrong in &mut block[accepted + 1..] {
                        *wrong = (*wrong + 1 + round) % VOCAB;
                    }
                    let got = run_chunks(&mut s, 0, &block, 6);
                    for j in 0..=accepted {
                        assert_eq!(got[j], clean[at + j], "{format:?} {accepted} at {}", at + j);
                    }
                    at += accepted + 1;
                    s.truncate(0, at);
                    round += 1;
                }
                let rest = run_chunks(&mut s, 0, &tokens[at..], 5);
                assert_eq!(rest, clean[at..], "{format:?}: {accepted} accepted from {first}");
            }
        }
    }
}

#[test]
fn drafting_depends_on_the_sequence_alone() {
    let texts: Vec<Vec<u32>> =
        (0..3).map(|i| random_tokens(20 + i, 13 + 20 * i as usize, VOCAB)).collect();
    for format in FORMATS {
        let draft = |s: &mut Session<Cpu>, slots: &[usize]| {
            let pairs: Vec<_> = slots.iter().map(|&slot| (slot, 7 + slot as u32)).collect();
            s.draft(&pairs, 5, &mut GreedyDrafts).unwrap()
        };
        let mut s = session(format, 3, 2);
        for (slot, text) in texts.iter().enumerate() {
            run_chunks(&mut s, slot, text, 11);
        }
        let (tokens, confidences) = draft(&mut s, &[2, 0, 1]);
        for (i, slot) in [2, 0, 1].into_iter().enumerate() {
            let mut alone = session(format, 3, 1);
            run_chunks(&mut alone, slot, &texts[slot], 512);
            let (t, c) = draft(&mut alone, &[slot]);
            assert_eq!(t[0], tokens[i]);
            assert_eq!(c[0], confidences[i]);
            // Drafting wrote nothing: the same again.
            assert_eq!(draft(&mut alone, &[slot]), (t, c));
        }
    }
}

#[test]
fn a_restored_sequence_goes_on_with_the_same_bits() {
    let tokens = random_tokens(5, 200, VOCAB);
    for format in FORMATS {
        let clean = run_chunks(&mut session(format, 1, 1), 0, &tokens, 200);
        let mut s = session(format, 3, 2);
        let other = random_tokens(6, 150, VOCAB);
        for cut in [1, 2, 7, 8, 9, 100, 127, 128, 129] {
            s.truncate(0, 0);
            run_chunks(&mut s, 0, &tokens[..cut], 64);
            let pages = s.pages(0);
            let saved = s.caches.snapshot(&s.device, 0, &pages, cut as u32).unwrap();
            // Somebody else uses the slot and its pages.
            s.truncate(0, 0);
            run_chunks(&mut s, 0, &other, 64);
            let target = s.pages(2);
            s.caches.restore(&s.device, &saved, 2, &target).unwrap();
            s.texts[2] = tokens[..cut].to_vec();
            assert_eq!(run_chunks(&mut s, 2, &tokens[cut..], 13), clean[cut..], "{format:?} {cut}");
        }
    }
}

#[test]
fn a_fork_shares_nothing_that_changes() {
    let tokens = random_tokens(8, 140, VOCAB);
    let branch = random_tokens(9, 30, VOCAB);
    for format in FORMATS {
        let mut s = session(format, 2, 1);
        run_chunks(&mut s, 0, &tokens[..131], 64);
        s.caches.copy_slot(&s.device, 0, 1).unwrap();
        for (from, to) in s.pages(0).into_iter().zip(s.pages(1)) {
            s.caches.copy_page(&s.device, from, to).unwrap();
        }
        s.texts[1] = s.texts[0].clone();
        run_chunks(&mut s, 1, &branch, 3);
        let rest = run_chunks(&mut s, 0, &tokens[131..], 4);
        let clean = run_chunks(&mut session(format, 1, 1), 0, &tokens, 140);
        assert_eq!(rest, clean[131..], "{format:?}");
    }
}

#[test]
fn prefill_modes_agree_in_pairs() {
    for format in FORMATS {
        modes::check_random(&mut session(format, 1, 2), 15, 250, VOCAB, "tiny-a");
    }
}

/// With windows of 8 and three decoder layers, a prompt of 200 tokens costs the decoder 22, 15 and 8
/// rows in place of 600.
#[test]
fn the_decoder_runs_the_rows_that_matter() {
    let tokens = random_tokens(12, 200, VOCAB);
    let mut s = session(FORMATS[0], 1, 2);
    let mut rows = modes::RowCount::default();
    modes::read(&mut s, &tokens, &[], &[64], modes::Mode::Exact, 199, &mut rows);
    assert_eq!(rows.attention[5..], [22, 15, 8]);
    let mut rows = modes::RowCount::default();
    modes::read(&mut s, &tokens, &[], &[64], modes::Mode::Off, 199, &mut rows);
    assert_eq!(rows.attention[5..], [200; 3]);
    let mut rows = modes::RowCount::default();
    modes::read(&mut s, &tokens, &[], &[64], modes::Mode::Compact(14), 199, &mut rows);
    assert_eq!(rows.attention[5..], [14; 3]);
}
