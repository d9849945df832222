//! Requests for stripes of other cores: cores that end with them, a full inbox, an array that has
//! stopped.

use super::*;
use reactor::{Core, CoreConfig, Cores};
use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

const BLOCK: usize = 4096;

/// Blocks of the first stripes that a core owns, one in each strip on the member in `slot`.
fn blocks_of(array: &Array, core: &Core, slot: usize) -> Vec<u64> {
    let owner = registry::find(array.shared.id).unwrap();
    let geometry = &array.config().geometry;
    let is_chosen = |offset: &u64| {
        let place = geometry.locate(*offset);
        owner.owner_of(place.stripe).is_same(&core.remote())
            && geometry.member(place.stripe, place.strip) == slot
    };
    let blocks: Vec<u64> =
        (0..8 << 20).step_by(geometry.strip_bytes as usize).filter(is_chosen).take(20).collect();
    assert_eq!(blocks.len(), 20);
    blocks
}

/// The byte that fills a block.
fn content(offset: u64) -> u8 {
    (offset >> 14) as u8 | 1
}

type Ends = Vec<Pin<Box<dyn Future<Output = bool>>>>;

/// Writes of blocks, and reads of others that were written before. Their futures say whether all
/// is well.
fn requests(channel: &Rc<dyn Channel>, writes: &[u64], reads: &[u64]) -> Ends {
    let mut ends: Ends = Vec::new();
    for offset in writes.iter().copied() {
        let channel = channel.clone();
        ends.push(Box::pin(async move { write(&*channel, offset, content(offset), BLOCK).await.is_ok() }));
    }
    for offset in reads.iter().copied() {
        let channel = channel.clone();
        ends.push(Box::pin(async move {
            read(&*channel, offset, BLOCK).await.is_ok_and(|bytes| bytes == [content(offset); BLOCK])
        }));
    }
    ends
}

/// Polls some requests once: they are sent before any core takes a turn.
async fn send(ends: &mut Ends) {
    std::future::poll_fn(|cx| {
        assert!(ends.iter_mut().all(|end| end.as_mut().poll(cx).is_pending()));
        Poll::Ready(())
    })
    .await;
}

#[test]
fn requests_that_wait_and_run_on_a_core_that_ends_are_carried_out_by_its_successors() {
    for seed in 0..10 {
        reactor::run_simulated_cores(seed, 3, |_, cores: Vec<Core>| async move {
            let (array, _, channel) = start_on_three(&cores).await;
            let blocks = blocks_of(&array, &cores[2], 0);
            let (old, new) = blocks.split_at(10);
            assert!(crate::metadata::all(requests(&channel, old, &[])).await.iter().all(|is_well| *is_well));
            // Without its member, a strip is read by the owner of its stripe.
            array.fail(0).await.unwrap();
            let ending = cores[2].with_current(|| registry::find(array.shared.id)).unwrap();
            ending.close_gates(cores[0].remote()).await;
            drop(ending);
            let mut at_work = requests(&channel, &new[..5], &old[..5]);
            send(&mut at_work).await;
            cores[0].sleep(1_000_000).await;
            let mut in_inbox = requests(&channel, &new[5..], &old[5..]);
            send(&mut in_inbox).await;
            cores[2].end_simulated();
            at_work.extend(in_inbox);
            let ends = crate::metadata::all(at_work).await;
            assert!(ends.len() == 20 && ends.iter().all(|is_well| *is_well));
            assert_eq!(array.shared.common.owner_cores().len(), 2);
            let ends = crate::metadata::all(requests(&channel, &[], &blocks)).await;
            assert!(ends.iter().all(|is_well| *is_well));
        });
    }
}

#[test]
fn more_requests_than_the_inbox_of_an_owner_holds_are_all_carried_out() {
    const ROUNDS: usize = 100;
    reactor::run_simulated_cores(1, 3, |_, cores: Vec<Core>| async move {
        let (array, _, channel) = start_on_three(&cores).await;
        let blocks = blocks_of(&array, &cores[2], 0);
        // More than 1024, at the same time.
        let mut ends = Vec::new();
        for _ in 0..ROUNDS {
            ends.extend(requests(&channel, &blocks, &[]));
        }
        send(&mut ends).await;
        let ends = crate::metadata::all(ends).await;
        assert!(ends.len() == ROUNDS * 20 && ends.iter().all(|is_well| *is_well));
        let ends = crate::metadata::all(requests(&channel, &[], &blocks)).await;
        assert!(ends.iter().all(|is_well| *is_well));
    });
}

#[test]
fn requests_for_an_array_that_the_owner_no_longer_has_end_with_an_error() {
    reactor::run_simulated_cores(1, 3, |_, cores: Vec<Core>| async move {
        let (array, _, channel) = start_on_three(&cores).await;
        let block = blocks_of(&array, &cores[2], 0)[0];
        registry::remove(array.shared.id);
        assert_eq!(write(&*channel, block, 1, BLOCK).await, Err(IoError::DeviceGone));
    });
}

#[test]
fn an_owner_whose_thread_ends_loses_no_write_of_another_thread() {
    for round in 0..5 {
        let cores = Cores::start(&[CoreConfig::default(), CoreConfig::default()]).unwrap();
        let array = cores.get(0).block_on(|_| async {
            let (array, _) = start(&config(Level::Raid5, 1, 3, 1), &[]).await;
            array.open_channel().unwrap();
            array
        });
        let array = array.unwrap();
        let other = array.clone();
        cores.get(1).call(move |_| drop(other.open_channel().unwrap())).unwrap();
        while array.shared.common.owner_cores().len() < 2 {
            std::thread::yield_now();
        }
        let (ending, written) = (cores.get(1), array.clone());
        let left = cores.get(0).block_on(move |core| async move {
            let channel = written.open_channel().unwrap();
            let left = Rc::new(std::cell::Cell::new(16u64));
            for task in 0..16 {
                let (channel, left, ending) = (channel.clone(), left.clone(), ending.clone());
                core.spawn(async move {
                    for number in 0..200 {
                        let offset = (task * 200 + number) * 4096;
                        write(&*channel, offset, content(offset), BLOCK).await.unwrap();
                        if (task, number) == (0, 40 * round) {
                            ending.stop();
                        }
                        reactor::yield_now().await;
                    }
                    left.set(left.get() - 1);
                });
            }
            while left.get() > 0 {
                core.sleep(100_000).await;
            }
            for offset in (0..16 * 200 * 4096).step_by(4096) {
                assert_eq!(read(&*channel, offset, BLOCK).await.unwrap(), [content(offset); BLOCK]);
            }
            written.shared.common.owner_cores().len()
        });
        assert_eq!(left, Ok(1));
        drop(array);
    }
}
