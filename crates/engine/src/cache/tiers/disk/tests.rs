use super::file::{decode, partial, try_to_write, write_file};
use super::*;
use crate::cache::Snapshot;
use proptest::prelude::*;
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

fn description(key: u8, lowest: Option<usize>) -> Description {
    let tokens = [1, 2, 3].as_slice().into();
    Description { key: [key; 16], parent: [9; 16], tokens, lowest, at_root: true }
}

fn page(bytes: usize) -> Entry {
    Entry::Page(Arc::new(vec![5; bytes]))
}

fn limits(files: u64) -> Limits {
    Limits { files, queue: 1 << 30 }
}

fn open(dir: &Path, limits: Limits) -> Disk {
    Disk::open(dir, limits, b"me").expect("opens")
}

/// Waits until everything is done, and takes it in.
fn finish(disk: &mut Disk) -> (Vec<Loaded>, Vec<Key>) {
    disk.flush();
    disk.loaded()
}

/// Reads one entry and waits for it.
fn read(disk: &mut Disk, key: &Key) -> Option<Entry> {
    finish(disk);
    if !matches!(disk.get(key), Stored::Coming) {
        return None;
    }
    let (mut loaded, _) = finish(disk);
    assert_eq!(loaded.len(), 1);
    let (found, entry) = loaded.remove(0);
    assert_eq!(found, *key);
    entry
}

fn state() -> Snapshot {
    Snapshot { position: 7, lowest: 6, slot: vec![1, 2, 3], pages: vec![vec![4; 5]] }
}

#[test]
fn entries_survive_a_restart() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut disk = open(dir.path(), limits(1 << 20));
    disk.put(description(1, None), page(100));
    disk.put(description(2, Some(6)), Entry::State(Arc::new(state())));
    drop(disk);
    let mut disk = open(dir.path(), limits(1 << 20));
    assert_eq!(disk.found.len(), 2);
    let page = read(&mut disk, &[1; 16]);
    assert!(matches!(page, Some(Entry::Page(bytes)) if *bytes == vec![5; 100]));
    let found = read(&mut disk, &[2; 16]);
    assert!(matches!(found, Some(Entry::State(s)) if *s == state()));
    let mut other = Disk::open(dir.path(), limits(1 << 20), b"another").expect("opens");
    assert!(other.found.is_empty() && read(&mut other, &[1; 16]).is_none());
}

#[test]
fn a_missing_file_is_a_miss() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut disk = open(dir.path(), limits(1 << 20));
    disk.put(description(1, None), page(100));
    disk.flush();
    fs::remove_file(disk.path(&[1; 16])).expect("is there");
    assert!(read(&mut disk, &[1; 16]).is_none());
    assert_eq!(disk.bytes, 0);
    assert!(matches!(disk.get(&[1; 16]), Stored::Missing));
}

#[test]
fn the_oldest_files_make_room() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut disk = open(dir.path(), limits(1500));
    for key in 1..6 {
        disk.put(description(key, None), page(200));
    }
    disk.flush();
    assert!(disk.bytes <= 1500 && read(&mut disk, &[5; 16]).is_some());
    assert!(read(&mut disk, &[1; 16]).is_none());
    disk.flush();
    let sizes = fs::read_dir(dir.path()).expect("is there").flatten();
    let sizes: u64 = sizes.filter_map(|file| Some(file.metadata().ok()?.len())).sum();
    assert_eq!(sizes, disk.bytes);
    let files = fs::read_dir(dir.path()).expect("is there").count();
    assert_eq!(files, disk.files.len());
}

/// A beginning is used by everyone: it leaves after what hangs on it, and is there again when it
/// was written anew.
#[test]
fn a_shared_beginning_stays_on_disk() {
    let page = |key: u8, parent: u8| {
        let tokens = [1, 2, 3].as_slice().into();
        Description { key: [key; 16], parent: [parent; 16], tokens, lowest: None, at_root: false }
    };
    let entry = || Entry::Page(Arc::new(vec![5; 200]));
    for written_again in [false, true] {
        let dir = tempfile::tempdir().expect("a directory");
        let mut disk = open(dir.path(), limits(3000));
        disk.put(page(1, 0), entry());
        for tail in 2..52 {
            match written_again {
                true => assert!(!disk.put(page(1, 0), entry()).contains(&[1; 16])),
                false => disk.touch(&[1; 16]),
            }
            assert!(!disk.put(page(tail, 1), entry()).contains(&[1; 16]));
        }
        assert!(disk.bytes <= 3000 && disk.files.len() > 3);
        drop(disk);
        // After a restart, too: its file is the oldest if it was not written again.
        let mut disk = open(dir.path(), limits(3000));
        let held = disk.files.len();
        let mut dropped = Vec::new();
        while dropped.len() < held {
            dropped.extend(disk.put(page(100 + dropped.len() as u8, 9), entry()));
        }
        assert_eq!(dropped[held - 1], [1; 16], "{dropped:?}");
    }
}

#[test]
fn the_newest_tail_keeps_its_beginning_longest() {
    let entry =
        |key: u8, parent: u8| Description { parent: [parent; 16], ..description(key, None) };
    // 1 - 2 - 3 and 1 - 4 - 5, of which 3 was written last; 6 and 7 are on their own.
    let by_age = [(6, 0), (1, 0), (2, 1), (4, 1), (5, 4), (7, 9), (3, 2)];
    let by_age: Vec<Description> = by_age.map(|(key, parent)| entry(key, parent)).into();
    let keys: Vec<u8> = beginnings_last(&by_age).iter().map(|key| key[0]).collect();
    assert_eq!(keys, [6, 5, 4, 7, 3, 2, 1]);
}

/// Whatever identities there were, a directory holds what it may.
#[test]
fn files_of_other_identities_make_room_first() {
    let dir = tempfile::tempdir().expect("a directory");
    let put = |disk: &mut Disk, key: u8| disk.put(description(key, None), page(1000));
    let old = SystemTime::now().checked_sub(Duration::from_secs(60)).expect("is a time");
    for (identity, keys) in [(b"a", 10..14), (b"b", 20..24)] {
        let mut disk = Disk::open(dir.path(), limits(1 << 20), identity).expect("opens");
        keys.clone().for_each(|key| drop(put(&mut disk, key)));
        finish(&mut disk);
        for key in keys {
            let file = File::options().append(true).open(disk.path(&[key; 16])).expect("is there");
            file.set_modified(old + Duration::from_secs(key.into())).expect("can be set");
        }
    }
    let size = fs::metadata(dir.path().join(format!("{}.prefix", hex(&[10; 16]))));
    let size = size.expect("is there").len();
    let kept = || {
        let files = fs::read_dir(dir.path()).expect("is there").flatten();
        let mut keys: Vec<u8> = files.filter_map(|file| Some(key_of(&file.path())?[0])).collect();
        keys.sort_unstable();
        keys
    };
    // Neither an entry nor of a name that we give.
    let theirs = dir.path().join("film.prefix");
    fs::write(&theirs, [0; 5000]).expect("can be written");
    // A file without a header is nobody's any more.
    let broken = dir.path().join(format!("{}.prefix", hex(&[9; 16])));
    fs::write(&broken, [0; 500]).expect("can be written");
    File::options().append(true).open(&broken).expect("is there").set_modified(old).expect("set");

    let mut disk = open(dir.path(), limits(6 * size));
    assert!(disk.found.is_empty());
    finish(&mut disk);
    assert_eq!(kept(), [12, 13, 20, 21, 22, 23]);
    for key in 1..=3 {
        assert!(put(&mut disk, key).is_empty(), "others make room");
    }
    finish(&mut disk);
    assert_eq!(kept(), [1, 2, 3, 21, 22, 23]);
    for key in 4..=6 {
        assert!(put(&mut disk, key).is_empty());
    }
    assert_eq!(put(&mut disk, 7), [[1; 16]]);
    drop(disk);
    assert_eq!(kept(), [2, 3, 4, 5, 6, 7]);
    // With less room than there is, too.
    let mut disk = open(dir.path(), limits(2 * size));
    assert_eq!(disk.found.len(), 2);
    assert!(finish(&mut disk).1.is_empty());
    assert_eq!(kept().len(), 2);
    assert!(theirs.exists());
}

/// A file of our name that is no entry does not take away the one that is written in its place.
#[test]
fn what_was_not_written_to_its_end_is_removed_on_opening() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |key: u8| dir.path().join(format!("{}.prefix", hex(&[key; 16])));
    let other = head("another", &description(7, None), &page(0)).expect("encodes");
    let broken = [vec![0; 5000], Vec::new(), b"DIPREFX1".to_vec(), other.clone()];
    for (key, bytes) in (1..).zip(&broken) {
        fs::write(path(key), bytes).expect("can be written");
    }
    fs::write(path(7), other).expect("can be written");
    let mut disk = open(dir.path(), limits(6000));
    (1..=4).for_each(|key| assert!(!path(key).exists(), "{key} is nobody's"));
    assert!(path(7).exists(), "it is another's");
    assert!(disk.put(description(1, None), page(1000)).is_empty());
    assert!(read(&mut disk, &[1; 16]).is_some());
    // One that could not be read on opening, and may be another user's.
    disk.others.push_front((path(1), 5000));
    disk.other_bytes += 5000;
    assert!(disk.put(description(2, None), page(1000)).is_empty());
    assert!(read(&mut disk, &[1; 16]).is_some() && read(&mut disk, &[2; 16]).is_some());
    assert!(disk.other_bytes < 5000);
}

#[test]
fn a_directory_that_cannot_be_written_is_refused() {
    let folder = tempfile::tempdir().expect("a directory");
    let refused = |dir: &Path| match Disk::open(dir, limits(1 << 20), b"me") {
        Ok(_) => panic!("{dir:?} cannot be used"),
        Err(error) => error.to_string(),
    };
    let file = folder.path().join("file");
    fs::write(&file, "").expect("can be written");
    refused(&file.join("below"));
    refused(&file);
    if cfg!(target_os = "linux") {
        // A directory in which nobody may make files.
        let message = refused(Path::new("/proc/self/task"));
        assert!(message.contains("cannot write /proc/self/task/"), "{message}");
        assert!(message.contains(&format!(".{}.part: ", std::process::id())), "{message}");
    }
    let dir = folder.path().join("empty");
    drop(open(&dir, limits(1 << 20)));
    assert_eq!(fs::read_dir(&dir).expect("is there").count(), 0, "nothing is left of the trial");
}

/// Processes in containers may have the same number, and start at the same time.
#[test]
fn trials_do_not_get_into_each_others_way() {
    let dir = tempfile::tempdir().expect("a directory");
    let tries = |_| (0..50).try_for_each(|_| try_to_write(dir.path()));
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|i| scope.spawn(move || tries(i))).collect();
        for thread in threads {
            thread.join().expect("does not panic").expect("can be written");
        }
    });
    assert_eq!(fs::read_dir(dir.path()).expect("is there").count(), 0);
}

/// Prompts are in the files.
#[cfg(unix)]
#[test]
fn nobody_else_may_read_entries() {
    use std::os::unix::fs::PermissionsExt;
    let mode = |path: &Path| fs::metadata(path).expect("is there").permissions().mode() & 0o777;
    let folder = tempfile::tempdir().expect("a directory");
    let dir = folder.path().join("above").join("prefixes");
    let mut disk = open(&dir, limits(1 << 20));
    let path = disk.path(&[1; 16]);
    // What a try before has left.
    let left = partial(&path, std::process::id());
    fs::write(&left, "").expect("can be written");
    fs::set_permissions(&left, PermissionsExt::from_mode(0o644)).expect("can be set");
    disk.put(description(1, None), page(100));
    finish(&mut disk);
    assert_eq!((mode(&path), mode(&dir)), (0o600, 0o700));
    assert_eq!(mode(dir.parent().expect("is there")), 0o700);
    drop(disk);
    fs::set_permissions(&dir, PermissionsExt::from_mode(0o750)).expect("can be set");
    open(&dir, limits(1 << 20));
    assert_eq!(mode(&dir), 0o750, "whose it was before decides");
}

#[test]
fn what_a_crash_left_is_removed() {
    let dir = tempfile::tempdir().expect("a directory");
    let key = |key: u8| dir.path().join(format!("{}.prefix", hex(&[key; 16])));
    let file = |path: PathBuf, age: Duration| {
        let file = File::create(&path).expect("can be written");
        let time = SystemTime::now().checked_sub(age).expect("is a time");
        file.set_modified(time).expect("can be set");
        path
    };
    let (ended, other) = (u32::MAX, std::os::unix::process::parent_id());
    let hours = |count: u64| Duration::from_secs(3600 * count);
    let left = [
        file(partial(&key(1), ended), hours(2)),
        file(partial(&key(2), std::process::id()), hours(2)),
    ];
    let kept = [
        file(partial(&key(3), ended), hours(0)),
        file(partial(&key(4), std::process::id()), hours(0)),
        file(partial(&key(5), other), hours(2)),
        file(dir.path().join("notes.7.part"), hours(2)),
        file(dir.path().join("film.part"), hours(2)),
    ];
    open(dir.path(), limits(1 << 20));
    left.iter().for_each(|path| assert!(!path.exists(), "{path:?} was left"));
    kept.iter().for_each(|path| assert!(path.exists(), "{path:?} may be somebody's"));
}

#[test]
fn an_entry_is_served_before_and_after_it_was_written() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut disk = open(dir.path(), limits(1 << 30));
    let hold = disk.workers.hold(false);
    for key in 1..100 {
        disk.put(description(key, None), Entry::Page(Arc::new(vec![key; 1000])));
        let entry = disk.get(&[key; 16]);
        assert!(matches!(entry, Stored::Here(Entry::Page(b)) if *b == vec![key; 1000]));
    }
    drop(hold);
    let (loaded, lost) = finish(&mut disk);
    assert!(loaded.is_empty() && lost.is_empty() && disk.queued.is_empty());
    for key in 1..100 {
        assert!(matches!(disk.get(&[key; 16]), Stored::Coming));
        assert!(matches!(disk.get(&[key; 16]), Stored::Coming));
    }
    let (loaded, _) = finish(&mut disk);
    assert_eq!(loaded.len(), 99);
    let right = |entry: &Entry, key: &Key| entry.parts().eq([[key[0]; 1000]]);
    assert!(loaded.iter().all(|(key, entry)| entry.as_ref().is_some_and(|e| right(e, key))));
}

#[test]
fn what_waits_to_be_written_is_bounded() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut disk = open(dir.path(), Limits { files: 1 << 30, queue: 1000 });
    let hold = disk.workers.hold(false);
    let state =
        |bytes| Entry::State(Arc::new(Snapshot { slot: vec![5; bytes], ..Snapshot::default() }));
    assert!(disk.put(description(1, Some(0)), state(400)).is_empty());
    assert!(disk.put(description(2, None), page(400)).is_empty());
    for key in 3..50 {
        assert_eq!(disk.put(description(key, None), page(400)), [[key; 16]]);
        assert!(!disk.holds(&[key; 16]));
    }
    assert_eq!((disk.queued_bytes, disk.queued.len(), disk.files.len()), (800, 2, 2));
    assert_eq!(disk.losses(), Losses { failed: 0, skipped: 47 });
    // The file of a state that is not taken again may be another than the index knows.
    assert_eq!(disk.put(description(1, Some(0)), state(400)), [[1; 16]]);
    assert!(matches!(disk.get(&[1; 16]), Stored::Missing));
    drop(hold);
    finish(&mut disk);
    assert_eq!((disk.queued_bytes, disk.queued.len()), (0, 0));
    assert!(read(&mut disk, &[1; 16]).is_none() && read(&mut disk, &[2; 16]).is_some());
    // One alone may have any size.
    assert!(disk.put(description(3, None), page(5000)).is_empty());
    assert!(read(&mut disk, &[3; 16]).is_some());
    let files = fs::read_dir(dir.path()).expect("is there").count();
    assert_eq!(files, disk.files.len());
}

/// A page that is saved again is the same.
#[test]
fn a_full_queue_leaves_pages_where_they_are() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut disk = open(dir.path(), Limits { files: 1 << 30, queue: 500 });
    for key in 1..=2 {
        assert!(disk.put(description(key, None), page(400)).is_empty());
        finish(&mut disk);
    }
    let hold = disk.workers.hold(false);
    assert!(disk.put(description(3, None), page(400)).is_empty());
    for key in [1, 3] {
        assert!(disk.put(description(key, None), page(400)).is_empty());
        assert!(disk.holds(&[key; 16]));
    }
    assert_eq!((disk.queued_bytes, disk.losses()), (400, Losses::default()));
    assert_eq!(disk.order.first(), Some([2; 16]), "the first is used");
    drop(hold);
    assert!((1..=3).all(|key| read(&mut disk, &[key; 16]).is_some()));
}

/// Waits until something has been read.
fn wait_for_reader(disk: &mut Disk) -> Vec<Loaded> {
    loop {
        let (loaded, _) = disk.loaded();
        if !loaded.is_empty() {
            return loaded;
        }
        std::thread::yield_now();
    }
}

#[test]
fn reads_do_not_wait_for_writes() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut disk = open(dir.path(), limits(1 << 20));
    disk.put(description(1, None), page(100));
    finish(&mut disk);
    let hold = disk.workers.hold(false);
    disk.put(description(2, None), page(100));
    assert!(matches!(disk.get(&[1; 16]), Stored::Coming));
    let loaded = wait_for_reader(&mut disk);
    assert!(matches!(loaded[..], [(key, Some(_))] if key == [1; 16]));
    assert!(disk.queued.contains_key(&[2; 16]), "it is held back");
    drop(hold);
}

/// A file system that hangs: requests go on without it.
#[test]
fn a_directory_that_does_not_answer_is_given_up_until_it_does() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut disk = open(dir.path(), limits(1 << 20));
    (1..=2).for_each(|key| drop(disk.put(description(key, None), page(100))));
    finish(&mut disk);
    let hold = disk.workers.hold(true);
    assert!(matches!(disk.get(&[1; 16]), Stored::Coming));
    assert!(disk.loaded().0.is_empty(), "there is time yet");
    disk.patience = Duration::ZERO;
    let (loaded, lost) = disk.loaded();
    assert!(matches!(loaded[..], [(key, None)] if key == [1; 16]));
    assert!(lost.is_empty());
    for key in 1..=2 {
        assert!(matches!(disk.get(&[key; 16]), Stored::Silent));
    }
    assert!(matches!(disk.get(&[3; 16]), Stored::Missing));
    disk.patience = PATIENCE;
    drop(hold);
    let (loaded, _) = finish(&mut disk);
    assert!(loaded.is_empty(), "nobody waits for it any more");
    assert!(read(&mut disk, &[1; 16]).is_some() && read(&mut disk, &[2; 16]).is_some());
}

/// A state may be saved again with other bounds while its file is read.
#[test]
fn what_is_read_is_not_older_than_what_was_taken_in() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut disk = open(dir.path(), limits(1 << 20));
    disk.put(description(1, Some(6)), Entry::State(Arc::new(state())));
    finish(&mut disk);
    let hold = disk.workers.hold(true);
    assert!(matches!(disk.get(&[1; 16]), Stored::Coming));
    let newer = Snapshot { lowest: 4, slot: vec![9], ..state() };
    disk.put(description(1, Some(4)), Entry::State(Arc::new(newer.clone())));
    drop(hold);
    assert!(finish(&mut disk).0.is_empty());
    let found = read(&mut disk, &[1; 16]);
    assert!(matches!(found, Some(Entry::State(s)) if *s == newer));
}

#[test]
fn a_file_is_removed_after_it_was_read() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut disk = open(dir.path(), limits(1000));
    disk.put(description(1, None), page(400));
    finish(&mut disk);
    let hold = disk.workers.hold(true);
    assert!(matches!(disk.get(&[1; 16]), Stored::Coming));
    assert_eq!(disk.put(description(2, None), page(400)), [[1; 16]]);
    assert!(disk.holds(&[1; 16]), "it is being read");
    drop(hold);
    let (loaded, _) = finish(&mut disk);
    assert!(matches!(loaded[..], [(key, Some(_))] if key == [1; 16]));
    assert!(!disk.holds(&[1; 16]));
    finish(&mut disk);
    assert!(!disk.path(&[1; 16]).exists() && disk.path(&[2; 16]).exists());
}

#[test]
fn what_cannot_be_written_is_told() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut disk = open(dir.path(), limits(1 << 20));
    let place = partial(&disk.path(&[1; 16]), std::process::id());
    fs::create_dir(&place).expect("can be made");
    disk.put(description(1, None), page(100));
    let mut lost = disk.put(description(2, None), page(100));
    lost.extend(finish(&mut disk).1);
    assert_eq!(lost, [[1; 16]]);
    assert_eq!(disk.losses(), Losses { failed: 1, skipped: 0 });
    assert!(!disk.holds(&[1; 16]) && disk.holds(&[2; 16]));
    assert_eq!(disk.bytes, fs::metadata(disk.path(&[2; 16])).expect("is there").len());
    fs::remove_dir(&place).expect("is there");
    assert!(disk.put(description(1, None), page(100)).is_empty());
    assert!(read(&mut disk, &[1; 16]).is_some());
}

proptest! {
    /// A damaged file is a miss: any byte, any length.
    #[test]
    fn damage_is_found(at in 0usize..10_000, to in any::<u8>(), cut in any::<bool>()) {
        let entry = Entry::State(Arc::new(state()));
        let head = head("me", &description(1, Some(2)), &entry).expect("encodes");
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("file");
        write_file(&path, &head, &entry).expect("can be written");
        let file = fs::read(&path).expect("is there");
        let at = at % file.len();
        let mut damaged = file.clone();
        if cut { damaged.truncate(at) } else { damaged[at] = to }
        let read = decode("me", &[1; 16], &damaged);
        prop_assert_eq!(read.is_some(), damaged == file);
    }
}
